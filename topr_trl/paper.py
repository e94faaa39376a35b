"""The paper, as model cards cite it."""

import textwrap

PAPER = {
    "title": "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs",
    "id": "2503.14286",
    "citation": textwrap.dedent("""\
        @article{leroux2025topr,
            title  = {{Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs}},
            author = {Nicolas {Le Roux} and Marc G. Bellemare and Jonathan Lebensold and Arnaud Bergeron and
                      Joshua Greaves and Alex Fr{\\'e}chette and Carolyne Pelletier and Eric Thibodeau-Laufer and
                      S{\\'a}ndor Toth and Sam Work},
            year   = 2025,
            eprint = {arXiv:2503.14286},
        }"""),
}
