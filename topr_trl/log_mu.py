"""log μ: the log-probability of each response under the model that starts the round, scored once and kept."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from topr_trl.loss import TruncationLimits

# Elements of each parameter that enter the fingerprint. Training moves nearly all of them, so a sample tells.
_SAMPLED = 512


def fingerprint(model: nn.Module, accelerator: Accelerator | None = None) -> str:
    """A short hash of a model's weights: names, shapes and evenly spaced values of all parameters.

    Equal weights give equal fingerprints whatever the dtype they were widened to and however they are sharded.
    Adapters count.

    Args:
        model: all processes must call it together if its weights are sharded (DTensor, ZeRO-3).
        accelerator: if given, every process gets the main process's: elsewhere the weights may not be loaded yet.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        with _whole(parameter) as whole:
            flat = whole.detach().reshape(-1)
            count = min(len(flat), _SAMPLED)
            digest.update(f"{name}{tuple(whole.shape)}".encode())
            if not flat.is_meta:
                # In integers: float32 cannot tell the last of over 2^24 elements from the one after it.
                sample = flat[torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)]
                digest.update(sample.float().cpu().numpy().tobytes())
    result = [digest.hexdigest()[:16]]
    return (broadcast_object_list(result) if accelerator and accelerator.num_processes > 1 else result)[0]


@contextmanager
def _whole(parameter: nn.Parameter) -> Iterator[Tensor]:
    """The whole of a parameter that may be sharded."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def rows_that_need_log_mu(rewards_N: NDArray[np.float64], limits: TruncationLimits) -> NDArray[np.bool_]:
    """(N,) Which rows have a weight that depends on the ratio: none with R = 0, no sign whose two limits are equal."""
    return np.where(rewards_N > 0, limits.ratio_matters_pos, limits.ratio_matters_neg) & (rewards_N != 0)


def check_log_mu(
    dataset: Dataset, needs: NDArray[np.bool_], model: str, ratio_level: str, rows: NDArray[np.int64] | None = None
) -> None:
    """Check log μ that came with the rows, where it is needed.

    Args:
        dataset: rows with `mu_logps` (floats, one a token, or their sum), `input_ids`, `prompt_length`, and perhaps
            `mu_fingerprint`.
        needs: (N,) which rows need it.
        model: fingerprint of the model in training.
        ratio_level: of the loss; `"token"` needs a value a token.
        rows: (N,) their numbers in messages; default: from 0.

    Raises:
        ValueError: it was scored by another model, or a row's values are missing, impossible or not one a token.
    """
    if "mu_fingerprint" in dataset.column_names:
        others = set(pc.unique(column(dataset, "mu_fingerprint").filter(pa.array(needs))).to_pylist()) - {model}
        if others:
            raise ValueError(
                f"Column `mu_logps` was scored by another model: mu_fingerprint {sorted(map(str, others))[0]}, and the "
                f"model in training has {model}. If that model did write these rows and is the μ you mean, remove the "
                "column `mu_fingerprint`; to score log μ with the model in training, remove both."
            )
    all_tokens = lengths_of(dataset) - column(dataset, "prompt_length").to_numpy()
    numbers = np.arange(len(dataset)) if rows is None else rows
    for i, mu, tokens, needed in zip(numbers, dataset["mu_logps"], all_tokens, needs, strict=True):
        if not needed:
            continue
        values = mu if isinstance(mu, list) else [mu]
        if isinstance(mu, list) and len(mu) != tokens:
            raise ValueError(
                f"Row {i}: log μ of {len(mu)} tokens for a completion of {tokens}. Give a value for each token of "
                "`completion_ids`; or drop the column, and log μ is scored."
            )
        # Rounding may leave a certain token a little above 0.
        wrong = [value for value in values if not (isinstance(value, int | float) and -math.inf < value <= 1e-3)]
        if wrong:
            raise ValueError(
                f"Row {i}: log μ must be a finite number of at most 0 for each token, or their sum; "
                f"found {wrong[0]}. Drop the column, and log μ is scored."
            )
        if ratio_level == "token" and not isinstance(mu, list):
            raise ValueError(f"Row {i}: ratio_level='token' needs log μ for each token, not their sum.")


def column(dataset: Dataset, name: str) -> pa.ChunkedArray:
    """A column as Arrow holds it, in the order of the dataset, which may have an index beside its table."""
    return dataset.select_columns([name]).with_format("arrow")[:][name]


def lengths_of(dataset: Dataset) -> NDArray[np.int64]:
    """(N,) tokens of `input_ids`."""
    return np.asarray(pc.list_value_length(column(dataset, "input_ids")), dtype=np.int64)


_AT_ONCE = 8_192  # rows that are held as Python objects, and sorted by length


@torch.no_grad()
def score_log_mu(
    forward: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    dataset: Dataset,
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]],
    accelerator: Accelerator,
    batch_size: int,
    folder: Path,
    model: str,
    rows: str,
) -> pa.Array:
    """Per-token log-probabilities of the responses, in the order of the dataset, on every process.

    Each process scores its share; rows of similar length go together so that little padding is scored. Every so many
    rows what has been scored is kept in `folder`; a run that was killed goes on from there.

    Args:
        forward: a collated batch to (B, T) log-probabilities and the (B, T) mask of response tokens.
        dataset: rows with `input_ids`.
        collate: rows to a batch of tensors.
        accelerator: shards the rows over the processes and gathers the results.
        batch_size: rows a process scores at once.
        folder: for the parts; whoever calls removes it when the whole is safe.
        model, rows: fingerprints that go with the parts. Parts with others are scored anew.

    Returns:
        Arrow list of float32, a value for each response token.
    """
    progress = tqdm(total=len(dataset), desc="Scoring log μ", disable=not accelerator.is_main_process, leave=False)
    scored = []
    for start in range(0, len(dataset), _AT_ONCE):
        part = dataset.select(range(start, min(start + _AT_ONCE, len(dataset))))
        path = folder / f"{start}.parquet"
        logps = _kept(path, model, rows, accelerator)
        if logps is None:
            logps = _score(forward, part, collate, accelerator, batch_size, progress)
            if accelerator.is_main_process:
                save_log_mu(path, pa.array(logps, _LOGPS), model, rows)
        else:
            progress.update(len(part))
        scored.append(pa.array(logps, _LOGPS))
    progress.close()
    return pa.concat_arrays(scored) if scored else pa.array([], _LOGPS)


def _kept(path: Path, model: str, rows: str, accelerator: Accelerator) -> list[list[float]] | None:
    """What the main process finds in a part, on every process: the others may have no such disk."""
    found: list[list[list[float]] | None] = [None]
    if accelerator.is_main_process and path.is_file():
        try:
            found = [load_log_mu(path, model, rows).to_pylist()]
        except ValueError:
            path.unlink()
    return broadcast_object_list(found)[0]


_LOGPS = pa.list_(pa.float32())


def _score(
    forward: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    dataset: Dataset,
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]],
    accelerator: Accelerator,
    batch_size: int,
    progress: Any,
) -> list[list[float]]:
    order = np.argsort(-lengths_of(dataset), kind="stable")
    loader = DataLoader(dataset.select(order), batch_size=batch_size, collate_fn=collate)
    loader = accelerator.prepare_data_loader(loader)
    scored: list[list[float]] = []
    for batch in loader:
        logps, mask = forward(batch)
        # Response tokens to the front, so that rows of different processes can be laid on each other.
        counts = mask.sum(-1, keepdim=True)
        packed = logps.new_full(logps.shape, torch.nan, dtype=torch.float32)
        packed[torch.arange(mask.size(1), device=mask.device) < counts] = logps[mask.bool()].float()
        packed = accelerator.pad_across_processes(packed, dim=1, pad_index=torch.nan)
        packed, counts = accelerator.gather_for_metrics((packed, counts))
        scored += [row[:n] for row, n in zip(packed.tolist(), counts.squeeze(1).tolist(), strict=True)]
        progress.update(len(counts))
    result: list[list[float]] = [[]] * len(order)
    for position, logps_row in zip(order, scored, strict=True):
        result[position] = logps_row
    return result


# Mean difference, in nats a token, beyond which the sampler had other weights or settings, not merely other kernels.
_FAR = 0.1


def sampler_distance(mu_logps: list[list[float]], sampler_logps: list[list[float] | None]) -> dict[str, float]:
    """How far the sampler's log-probabilities of responses are from the trainer's; warns if they are far.

    Args:
        mu_logps: N lists of the trainer's log-probabilities, one a token.
        sampler_logps: N lists of the sampler's, or None where it reported none.

    Returns:
        `token`: mean absolute difference of a token's log-probability; `token_max`: the largest; `response`: mean
        absolute difference of a response's, which is the noise in log π/μ under `log_mu="sampler"`. Empty without rows.
    """
    pairs = [(np.asarray(m), np.asarray(s)) for m, s in zip(mu_logps, sampler_logps, strict=True) if s is not None]
    cut = [len(s) for m, s in pairs if len(m) != len(s)]
    if cut:
        warnings.warn(
            f"{len(cut)} of {len(pairs)} rows have sampler_logps of another length than their completion_ids: other "
            "tokens are trained on than the sampler wrote. Keep the sampler's completion_ids with the rows.",
            stacklevel=2,
        )
    pairs = [(m, s) for m, s in pairs if len(m) == len(s) > 0]
    if not pairs:
        return {}
    tokens = np.abs(np.concatenate([m - s for m, s in pairs]))
    distance = {
        "token": float(tokens.mean()),
        "token_max": float(tokens.max()),
        "response": float(np.mean([abs((m - s).sum()) for m, s in pairs])),
    }
    warn_if_far(distance["token"])
    return distance


def warn_if_far(distance: float) -> None:
    """Warn if sampler and trainer differ by more than rounding explains.

    Args:
        distance: mean absolute difference of a token's log-probability, in nats.
    """
    if distance > _FAR:
        warnings.warn(
            f"The sampler's log-probabilities differ from the trainer's by {distance:.2f} a token: the sampler had "
            "other weights, another tokenizer or RoPE settings, or computed at low precision. Sample from the "
            "checkpoint that training starts from, in the precision of training. If another model did write the rows, "
            "set log_mu='sampler'.",
            stacklevel=3,
        )


def rows_fingerprint(dataset: Dataset, needs: NDArray[np.bool_]) -> str:
    """A short hash of the tokens and rewards of all rows, and of which of them need log μ."""
    digest = hashlib.sha256()
    for ids in column(dataset, "input_ids").chunks:
        digest.update(ids.flatten().to_numpy().tobytes())
    prompts, rewards = (column(dataset, name).to_numpy() for name in ("prompt_length", "reward"))
    for values in (lengths_of(dataset), prompts, rewards, needs):
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def save_log_mu(path: Path, mu_logps: pa.Array, model: str, rows: str) -> None:
    """Write log μ with the fingerprints of the model that scored it and of the rows; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"mu_logps": mu_logps})
    partial = path.with_suffix(".partial")
    pq.write_table(table.replace_schema_metadata({"model": model, "rows": rows}), partial)
    partial.replace(path)


def load_log_mu(path: Path, model: str, rows: str) -> pa.ChunkedArray:
    """What `save_log_mu` wrote.

    Raises:
        ValueError: there is nothing; or it was scored by another model, or for other rows, rewards or limits.
    """
    if not path.is_file():
        raise ValueError(
            f"log μ of the run to resume is missing: {path}. It is of the weights that the run started with, so it "
            "cannot be scored now. Put the file back, or start anew."
        )
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{path} is damaged ({why}). Put it back whole, or start anew.") from error
    for what, expected in (("model", model), ("rows", rows)):
        found = (table.schema.metadata or {}).get(what.encode(), b"unknown").decode()
        if found != expected:
            raise ValueError(
                f"{path} holds log μ of another {'model' if what == 'model' else 'set of rows, rewards or limits'}: "
                f"fingerprint {found}, expected {expected}. Resume with the model, rows and settings that the run "
                "started with, or start anew in another output_dir."
            )
    return table["mu_logps"]
