"""Lay out a batch as one sequence in which adjacent rows share their common prefix.

Adjacent rows with a common prefix form a group:

    [shared | branch | branch | ...] [shared | branch | ...] ...

`shared` is the common prefix of a group, without the last token of the prefix. Each branch starts with this last token,
because its output predicts the first token after the prefix. A branch attends to `shared` and to itself.

Shape letters: B rows of at most T tokens, N tokens in the sequence, M positions that predict a label.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from topr_trl.trainers.generation_batches import take_rows

CONTEXT = -100  # label of a token that is not predicted
LEAST_SHARED = 8  # minimum number of shared tokens; sharing fewer tokens costs more than it saves
LEAST_SAVED = 0.1  # minimum share of tokens that a layout must save; below it, the conversion is not worthwhile


@dataclass
class Layout:
    """Layout of a batch as one sequence, with the indices that map outputs back to rows.

    Attributes:
        input_ids (`torch.Tensor`):
            Tokens, shape (1, N).
        position_ids (`torch.Tensor`):
            Position of each token in its rows, shape (1, N).
        times (`torch.Tensor`):
            Number of rows that a token belongs to, shape (1, N). The model gets it as the attention mask, because the
            mask weights tokens in the auxiliary loss of a mixture of experts.
        groups (`list[tuple[int, list[int]]]`):
            For each group, the number of shared tokens, and the number of tokens of each branch.
        scored (`torch.Tensor`):
            Positions in the sequence that predict a label, shape (M,).
        shift_labels (`torch.Tensor`):
            Labels of the positions in `scored`, shape (1, M).
        places_BT (`torch.Tensor`):
            For each token after the first column of the batch, the index into `scored` of the position that predicts
            the token, shape (B, T - 1). M if the token has no label. In a flattened batch, B is 1.
        tokens (`int`):
            Number of tokens of all rows, before sharing.
        masks (`dict`):
            Attention masks that were already made for this layout. Later layers use these masks again.
        windows_asked (`set[int | None]`):
            Sliding windows of the masks that the model requested. None is full attention.
        windows_used (`list[int | None]`):
            Sliding window that each attention layer used.
    """

    input_ids: Tensor
    position_ids: Tensor
    times: Tensor
    groups: list[tuple[int, list[int]]]
    scored: Tensor
    shift_labels: Tensor
    places_BT: Tensor
    tokens: int
    masks: dict[Any, Tensor] = field(default_factory=dict)
    windows_asked: set[int | None] = field(default_factory=set)
    windows_used: list[int | None] = field(default_factory=list)


def choose_groups(rows: Sequence[Sequence[int]], least: int = 1) -> list[tuple[int, int, int]]:
    """Group adjacent rows by common prefixes, so that as few tokens as possible are computed.

    Example:

    ```python
    >>> choose_groups([[1, 2, 3, 4], [1, 2, 3, 5], [7, 8]])
    [(0, 2, 2), (2, 3, 0)]
    ```

    Args:
        rows (`Sequence[Sequence[int]]`):
            Token ids of each row.
        least (`int`, *optional*, defaults to `1`):
            Minimum number of tokens that a group of several rows shares.

    Returns:
        `list[tuple[int, int, int]]`: for each group, the first row, the row after the last, and the number of shared
        tokens. A group of one row shares 0 tokens.
    """
    # Number of equal tokens at the start of each row and the next row.
    common = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairwise(rows)
    ]
    # Dynamic programming: `best[n]` has the number of saved tokens and the groups of the best solution for n rows.
    best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])]
    for end in range(1, len(rows) + 1):
        found, shared = [], sys.maxsize
        for start in range(end - 1, -1, -1):
            if start < end - 1:
                # Each branch needs at least two tokens: one that predicts, and one that is predicted.
                shared = min(shared, common[start] - 1, len(rows[start]) - 2, len(rows[end - 1]) - 2)
                if shared < least:
                    break
            kept = shared if end - start > 1 else 0
            found.append((best[start][0] + (end - start - 1) * kept, [*best[start][1], (start, end, kept)]))
        best.append(max(found, key=lambda each: each[0]))
    return best[-1][1]


def build_layout(
    input_ids_BT: Tensor, labels_BT: Tensor, mask_BT: Tensor | None, position_ids: Tensor | None, keep_last: bool
) -> Layout:
    """Return the layout of a batch, either padded or flattened (padding-free).

    Args:
        input_ids_BT (`torch.Tensor`):
            Tokens, shape (B, T). In a flattened batch, B is 1.
        labels_BT (`torch.Tensor`):
            Labels of the same shape. -100 marks a token that is not predicted.
        mask_BT (`torch.Tensor`, *optional*):
            Attention mask of a padded batch, shape (B, T). `None` for a flattened batch.
        position_ids (`torch.Tensor`, *optional*):
            Positions of a flattened batch, shape (1, T). They start at 0 in each row. Not used with `mask_BT`.
        keep_last (`bool`):
            Whether to compute the last token of each row. It predicts nothing, but the auxiliary loss counts it.
    """
    flat = input_ids_BT.flatten().tolist()
    if mask_BT is not None:
        width = input_ids_BT.size(1)
        cells = [(row.nonzero()[:, 0] + i * width).tolist() for i, row in enumerate(mask_BT.cpu())]
    else:
        assert position_ids is not None
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        cells = [list(range(a, b)) for a, b in pairwise([*starts, len(flat)])]
    rows = [[flat[cell] for cell in row] for row in cells]
    place_of = torch.full((len(flat),), -1)  # position in the sequence of each token of the batch; -1 if left out
    ids: list[int] = []
    positions: list[int] = []
    times: list[int] = []
    groups: list[tuple[int, list[int]]] = []
    for start, end, shared in choose_groups(rows, LEAST_SHARED):
        first = len(ids)
        lengths: list[int] = []
        ids += rows[start][:shared]
        positions += range(shared)
        times += [end - start] * shared
        for row, of_row in zip(rows[start:end], cells[start:end], strict=True):
            # Leave out the last token, which predicts nothing. But keep the only token of a row.
            stop = len(row) if keep_last else max(len(row) - 1, min(len(row), 1))
            place_of[of_row[:shared]] = torch.arange(first, first + shared)
            place_of[of_row[shared:stop]] = torch.arange(len(ids), len(ids) + stop - shared)
            ids += row[shared:stop]
            positions += range(shared, stop)
            times += [1] * (stop - shared)
            lengths.append(stop - shared)
        groups.append((shared, lengths))
    labels = labels_BT[:, 1:].cpu()
    has_label = labels != CONTEXT
    scored, inverse = torch.unique(place_of.view(input_ids_BT.shape)[:, :-1][has_label], return_inverse=True)
    shift_labels = torch.empty_like(scored).scatter_(0, inverse, labels[has_label])
    places = torch.full(has_label.shape, len(scored)).masked_scatter(has_label, inverse)
    device = input_ids_BT.device
    return Layout(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        times=torch.tensor([times], device=device),
        groups=groups,
        scored=scored.to(device),
        shift_labels=shift_labels[None].to(device),
        places_BT=places.to(device),
        tokens=sum(map(len, rows)),
    )


def prompts_together(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reorder the rows of TRL's micro-batches, so that rows of a prompt are adjacent.

    If all prompts are too short to be shared, the function returns `batches` itself. Otherwise, rows can move from one
    micro-batch to another. So pass only micro-batches of the same optimizer step.

    Args:
        batches (`list[dict[str, Any]]`):
            Micro-batches without images, of equal size and width.

    Returns:
        `list[dict[str, Any]]`: micro-batches of the same size. The given micro-batches are not changed.
    """
    prompts = [
        ids[mask.bool()].tolist()
        for batch in batches for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]  # fmt: skip
    if max(map(len, prompts), default=0) <= LEAST_SHARED:  # The last token of a prompt is not shared.
        return batches
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    size = len(order) // len(batches)
    joined = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    return [take_rows(joined, torch.tensor(order[start : start + size])) for start in range(0, len(order), size)]


def _joined(parts: list[Any]) -> Any:
    """Join the values of a column in several micro-batches. A value without rows is equal in all of them."""
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() > 0 else parts[0]


def saved_part(groups: Sequence[tuple[int, Sequence[int]]]) -> float:
    """Return the share of all rows' tokens that need not be computed. `groups` has the form of `Layout.groups`."""
    saved = sum(shared * (len(branches) - 1) for shared, branches in groups)
    tokens = sum(shared * len(branches) + sum(branches) for shared, branches in groups)
    return saved / max(tokens, 1)
