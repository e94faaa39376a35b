import bad_input
import pytest


class Nothing(bad_input.Kit):
    def __init__(self):
        self.folder = "/nowhere"


def test_a_case_checks_the_message_and_the_state_that_is_kept():
    def fails(kit):
        raise ValueError("Row 3\nholds nan. Drop it.")

    def case(words, check=lambda kit: None, error=ValueError):
        return bad_input.Case("", fails, words, check, error)

    case("row 3, nan, drop").run(Nothing())
    for words in ("row 4, nan", "row 3, na", "ow 3, nan", "row 3, nan, keep"):
        with pytest.raises(AssertionError):
            case(words).run(Nothing())
    with pytest.raises(ZeroDivisionError):
        case("row 3", lambda kit: 1 / 0).run(Nothing())
    with pytest.raises(ValueError, match="Row 3"):
        case("row 3", error=TypeError).run(Nothing())
