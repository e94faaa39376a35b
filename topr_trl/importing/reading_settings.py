"""Settings of `topr import` for reading files."""

from dataclasses import dataclass, field

from topr_trl.data.rows import ROLLOUT
from topr_trl.data.sampler_logps import LOGPROBS_MODES
from topr_trl.importing import FORMATS
from topr_trl.importing.input_settings import LAST_TURN, InputArguments
from topr_trl.recording.redaction import Redactor
from topr_trl.settings.checks import check_choice, check_types, existing


@dataclass
class ReadingArguments(InputArguments):
    """Settings for converting records to rows."""

    rewards: str | None = field(
        default=None,
        metadata={"help": "File of rewards: one JSON object per line with id and reward. See --id_field."},
    )
    requests: str | None = field(
        default=None,
        metadata={"help": "Input file of a batch (OpenAI, vLLM). Requests are matched to responses by custom_id."},
    )
    where: list[str] | None = field(
        default=None, metadata={"help": "Read only records with these values, such as filter=strict-match."}
    )
    id_field: str = field(default="id", metadata={"help": "Field of a record that matches an id in --rewards."})
    problem_field: str | None = field(
        default=None,
        metadata={"help": "Field with the id of the problem. Default: the format's field, or a hash of the prompt."},
    )
    rollout_field: str | None = field(
        default=None,
        metadata={"help": "Field with the id of the run, if a run has several records, one for each request."},
    )
    turn_discount: float | None = field(
        default=None,
        metadata={
            "help": "Discount in (0, 1] that makes returns of rewards of turns: each turn gets its own reward plus the "
            "discounted return of the next turn."
        },
    )
    temperature: float | None = field(
        default=None, metadata={"help": "Sampling temperature of all rows. It replaces values in the files."}
    )
    logprobs_mode: str | None = field(
        default=None,
        metadata={
            "help": "Kind of the logged log-probabilities: raw_logprobs (of the model) or processed_logprobs (after "
            "temperature and filters)."
        },
    )
    redact: list[str] | None = field(
        default=None,
        metadata={"help": "Regular expressions, or emails, phones and keys. Their matches in rows are blanked out."},
    )

    def __post_init__(self) -> None:
        check_types(self, ReadingArguments)
        self.check_input()
        Redactor(self.redact or ())  # The constructor checks the patterns.
        self.where_values  # noqa: B018  # The property raises an error for an invalid pair.
        if self.format is not None:
            self.check_format(self.format)
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")
        if self.turn_discount is not None:
            self._check_discount(self.turn_discount)
        if self.logprobs_mode is not None:
            check_choice(self, logprobs_mode=LOGPROBS_MODES)
        if self.rollout_field is not None and self.completion == LAST_TURN:
            raise ValueError(
                "completion='last_turn' and rollout_field: all turns of a run share one reward. Remove one of the two "
                "settings."
            )
        for name in ("rewards", "requests"):
            if getattr(self, name) is not None:
                existing(getattr(self, name), f"--{name}")
        if self.rewards is not None and self.reward_fields:
            raise ValueError("rewards and reward_fields both set the reward of a record. Keep one of them.")

    def _check_discount(self, discount: float) -> None:
        if not 0 < discount <= 1:
            raise ValueError(f"turn_discount must be above 0 and at most 1, not {discount}.")
        others = {"rollout_field": self.rollout_field is not None, "rewards": self.rewards is not None,
                  f"completion={LAST_TURN!r}": self.completion == LAST_TURN}  # fmt: skip
        if name := next((name for name, is_set in others.items() if is_set), None):
            raise ValueError(
                f"turn_discount and {name}: returns need a conversation in which turns have rewards of their own. "
                "Remove one of the two settings."
            )

    def check_format(self, name: str) -> None:
        """Check that the settings fit a format.

        Args:
            name (`str`): Name of the format.

        Raises:
            ValueError: a setting does not fit the format.
        """
        if self.rollout_field is not None and ROLLOUT in FORMATS[name].columns:
            raise ValueError(f"rollout_field: a record of format {name} is a whole run. Remove rollout_field.")
        if self.turn_discount is not None and not FORMATS[name].rates_turns:
            known = ", ".join(other for other, each in FORMATS.items() if each.rates_turns)
            raise ValueError(
                f"turn_discount: format {name} has no rewards of single turns. Remove turn_discount. Formats with such "
                f"rewards: {known}."
            )

    @property
    def where_values(self) -> dict[str, str]:
        """Return the values that fields must have, by the name of the field.

        Raises:
            ValueError: a pair is not of the form field=value.
        """
        pairs = [pair.partition("=") for pair in self.where or ()]
        if wrong := [name for name, is_pair, _ in pairs if not (name and is_pair)]:
            raise ValueError(f"where must be pairs such as filter=strict-match, not {wrong[0]!r}.")
        return {name: value for name, _, value in pairs}
