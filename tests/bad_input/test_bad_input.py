import bad_input
import pytest


def test_the_list_has_every_case():
    doors = bad_input.doors()
    listed = [line.split(" | ")[0].removeprefix("| ") for line in bad_input.PAGE.read_text().split("\n") if "|" in line]
    cases = [case.given for door in doors.values() for case in door]
    assert [given for given in listed if given not in ("given", "|---|---|---|")] == cases, "Run bad_input.py."
    assert len(set(cases)) == len(cases) >= 240


class Nothing(bad_input.Kit):
    def __init__(self):
        self.folder = "/nowhere"


def test_a_case_is_of_the_words_of_the_message_and_of_what_is_kept():
    def fails(kit):
        raise ValueError("Row 3\nholds nan. Drop it.")

    def case(words, check=lambda kit: None, error=ValueError):
        return bad_input.Case("", fails, words, bad_input.Kept("", check), error)

    case("row 3, nan, drop").run(Nothing())
    for words in ("row 4, nan", "row 3, na", "ow 3, nan", "row 3, nan, keep"):
        with pytest.raises(AssertionError):
            case(words).run(Nothing())
    with pytest.raises(ZeroDivisionError):
        case("row 3", lambda kit: 1 / 0).run(Nothing())
    with pytest.raises(ValueError, match="Row 3"):
        case("row 3", error=TypeError).run(Nothing())
