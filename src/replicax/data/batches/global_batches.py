"""Global batches: the elements that steps get, divided over the replicas."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from replicax.data.batches.local_batches import (
    END,
    BatchGroup,
    Division,
    HostBatch,
    HostGroup,
    LocalBatches,
    UnfitBatchError,
)
from replicax.data.batches.prefetch import Prefetcher
from replicax.data.batches.rows import Filler
from replicax.data.options import PartialBatch
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.workers.exchange import Cancelled

WHY_EMPTY = (
    "(partial_batch='drop' and drop_remainder=True leave nothing of fewer examples than a batch; a filter may let "
    "nothing through.)"
)


class GlobalBatches:
    """The elements of one pass, from number ``position`` on, if all workers read the same batches.

    ``place`` puts each on the devices. The ``local_batches`` of this worker are closed with this object.
    """

    def __init__(
        self,
        local_batches: LocalBatches | Prefetcher,
        division: Division,
        place: Callable[[HostBatch | BatchGroup], Any],
        position: int,
    ) -> None:
        self._local_batches = local_batches
        self._division = division
        self._place = place
        self._filler = Filler()
        self._rows = division.rows
        self._position = position
        self._is_over = False
        self._given = 0
        self._held: tuple[HostBatch | Exception, bytes] | None = None
        self.closing = False
        """Whether the pass has been cancelled."""
        self.is_placing = False
        """Whether ``place`` is running."""
        self.grouping: tuple[int, int] | None = None
        """How many elements a group has, and after how many elements of this pass the first group begins;
        ``None``: single elements. Set from any thread."""

    def __next__(self) -> Any:
        """The next element, or the next group of them, on the devices."""
        if self.grouping is not None:
            group = self._several(*self.grouping)
            self._given += group.count
            return group
        placed = self._put_on_devices(self._next_element())
        self._given += 1
        return placed

    def _next_element(self) -> HostBatch:
        if self._held is not None:
            (held, _), self._held = self._held, None
            if isinstance(held, Exception):
                raise held
            return held
        while not self._is_over:
            element = self._next_divided()
            if element is None:
                self._is_over = True
            elif self._division.partial is PartialBatch.DROP and element.sizes != self._rows:
                self._check_not_larger(element, sum)
            else:
                if self._division.partial is PartialBatch.PAD:
                    element = self._filled_element(element)
                self._position += 1
                return element
        if not self._position:
            raise ValueError(f"the dataset, {self._division.source}, gave no element. {WHY_EMPTY}")
        raise StopIteration

    def _put_on_devices(self, element: HostBatch | BatchGroup) -> Any:
        self.is_placing = True
        try:
            if self.closing:
                raise Cancelled
            return self._place(element)
        finally:
            self.is_placing = False

    def _several(self, steps: int, start: int) -> ElementGroup | Single:
        """The next elements of one kind, at most up to a multiple of ``steps`` elements after the first ``start``."""
        room = steps - (self._given - start) % steps
        states = [self.state()]
        first = self._next_element()
        states.append(self.state())
        if not first.alike:
            return Single(self._put_on_devices(first), states=states)
        group = HostGroup(first, room)
        while group.count < room:
            try:
                element = self._next_element()
            except StopIteration:
                break
            except Exception as error:  # raised after the elements before it are used
                self._held = error, states[-1]
                break
            if not group.takes(element):
                self._held = element, states[-1]
                break
            group.add(element)
            states.append(self.state())
        placed: ElementGroup = self._put_on_devices(group)
        return dataclasses.replace(placed, states=states)

    def state(self) -> bytes:
        """The place of the pass, pickled: after the last returned element."""
        if self._held is not None:
            return self._held[1]
        rows = None if self._rows is None else list(self._rows)
        return pickle.dumps({"batches": self._local_batches.state(), "position": self._position, "rows": rows})

    def cancel(self) -> None:
        """Cancel the element in progress. May be called from any thread."""
        self.closing = True
        self._local_batches.cancel()

    def close(self) -> None:
        """Close the reader of the batches."""
        self._local_batches.close()

    # --- dividing ---------------------------------------------------------------------------------------

    def _next_divided(self) -> HostBatch | None:
        """The next batch, divided over the replicas; ``None`` at the end."""
        local_batch = self._local_batch()
        if local_batch is END:
            return None
        if self._rows is None:
            self._rows = local_batch.sizes
        return local_batch

    def _local_batch(self) -> HostBatch:
        """This worker's part of the next element."""
        try:
            return next(self._local_batches, END)
        except UnfitBatchError as error:
            unfit = error
        raise unfit.named(self._where())

    def _filled_element(self, element: HostBatch) -> HostBatch:
        assert self._rows is not None
        self._check_not_larger(element, max, " for a replica")
        return dataclasses.replace(element, filled=self._filler.filled(element.parts, max(self._rows)))

    def _check_not_larger(self, element: HostBatch, size: Callable[[Iterable[int]], int], of: str = "") -> None:
        """Raise if an element has more examples than a full one, which the first is taken for."""
        assert self._rows is not None
        if size(element.sizes) > size(self._rows):
            raise ValueError(
                f"{self._where()} has {size(element.sizes)} examples{of}, after elements of {size(self._rows)}: "
                f"partial_batch={self._division.partial.value!r} takes the first element for a full one, and takes no "
                "more. Put a full one first, or pass partial_batch='exact'."
            )

    def _where(self) -> str:
        return f"element {self._position}"
