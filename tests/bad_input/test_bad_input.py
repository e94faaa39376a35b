import bad_input
import pytest


def test_the_page_is_made_of_the_cases():
    assert bad_input.PAGE.read_text() == bad_input.page(), "Run `python tests/bad_input/bad_input.py`."


def test_there_is_a_case_for_every_door_and_none_twice():
    doors = bad_input.doors()
    for door, cases in doors.items():
        assert len({case.given for case in cases}) == len(cases), door
    assert sum(map(len, doors.values())) >= 60


class Nothing(bad_input.Kit):
    def __init__(self):
        pass


def test_a_case_is_of_the_whole_message_and_of_what_is_kept():
    def fails(kit):
        raise ValueError("Row 3\nholds nan. Drop it.")

    def case(message, check=lambda kit: None):
        return bad_input.Case("", fails, message, bad_input.Kept("", check))

    case("Row … holds nan. Drop it.").run(Nothing())
    for message in ("holds nan", "Row … holds nan.", "Row 3 holds nan. Drop it. Or not."):
        with pytest.raises(AssertionError):
            case(message).run(Nothing())
    with pytest.raises(ZeroDivisionError):
        case("Row … holds nan. Drop it.", lambda kit: 1 / 0).run(Nothing())
