"""Write records of Argilla, in its nested and in its flat layout. No server is needed.

pip install argilla==2.8.0 && python with_argilla.py
"""

import json
from pathlib import Path
from uuid import UUID

import argilla
from argilla.records._io import GenericIO, JsonIO

ANNOTATORS = [UUID(int=n) for n in (1, 2)]
RESPONSES = {"12": [("rating", 5), ("helpful", "yes")], "17 legs": [("rating", 1), ("helpful", "no")]}


def record(name, fields, responses):
    given = [argilla.Response(question, value, user_id=user, status="submitted")
             for question, value in responses for user in ANNOTATORS]  # fmt: skip
    suggestions = [argilla.Suggestion("rating", 3, score=0.5, agent="m")]
    return argilla.Record(id=name, fields=fields, responses=given, suggestions=suggestions, metadata={"source": "a"})


def main():
    asked = "How many legs have 3 cats?"
    rated = [record(f"r{n}", {"prompt": asked, "response": answer}, responses)
             for n, (answer, responses) in enumerate(RESPONSES.items())]  # fmt: skip
    answers = {"response-1": "17 legs", "response-2": "12", "response-3": "Many."}
    rank = [("rank", ["response-2", "response-3", "response-1"])]
    JsonIO.to_json(rated, "argilla-2.8.0.json")
    JsonIO.to_json([record("k", {"prompt": asked, **answers}, rank)], "argilla-2.8.0-ranking.json")
    Path("argilla-2.8.0-flat.json").write_text(json.dumps(GenericIO.to_list(rated, flatten=True)))


if __name__ == "__main__":
    main()
