"""Elements: from the batches that a worker reads to what a step gets."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

from replicax.data.elements.batch_rows import BatchRows, Filler, Leaf
from replicax.data.elements.chunks import Chunk, Staged
from replicax.data.elements.portions import END, Division, Portion, Portions, UnfitBatchError
from replicax.data.elements.prefetch import Prefetcher
from replicax.data.input_options import PartialBatch
from replicax.execution.many_steps.element_groups import Single
from replicax.workers.exchange import CalledOff


@dataclasses.dataclass(frozen=True)
class Element:
    """One element, on the host.

    Attributes:
      tree: its structure.
      parts: what each of this worker's replicas has.
      sizes: how many examples each replica of all workers has.
      alike: whether all replicas have arrays of the same shapes.
      kinds: for each replica of all workers, shape and dtype of each leaf's rows; ``None``: the same for all.
      filled: the arrays ``[len(parts), rows, …]`` of a padded element; else ``None``.
      together: all parts, one after the other, in arrays that nobody else has; ``None`` if they have to be copied,
        because the dataset may fill them again.
    """

    tree: Any
    parts: list[BatchRows]
    sizes: tuple[int, ...]
    alike: bool
    kinds: tuple[tuple[Leaf, ...], ...] | None = None
    filled: list[Any] | None = None
    together: BatchRows | None = None

    @property
    def columns(self) -> list[Any]:
        """For each leaf what each of this worker's replicas has of it."""
        return list(zip(*(part.leaves for part in self.parts), strict=True)) if self.filled is None else self.filled

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """For each leaf its shape on each replica of all workers."""
        kinds = (self.parts[0].kinds(),) * len(self.sizes) if self.kinds is None else self.kinds
        sizes = [() if self.parts[0].is_example else (size,) for size in self.sizes]
        return [
            tuple((*size, *shape) for size, (shape, _) in zip(sizes, leaf, strict=True))
            for leaf in zip(*kinds, strict=True)
        ]


WHY_EMPTY = (
    "(partial_batch='drop' and drop_remainder=True leave nothing of fewer examples than a batch; a filter may let "
    "nothing through.)"
)


class Elements:
    """The elements of one pass over batches that all workers have alike, each given to ``place``.

    Args:
      portions: what this worker reads. They are closed with the elements.
      division: how batches are divided over the replicas.
      place: what becomes of each :class:`Element`.
      position: the number of the first element.
    """

    def __init__(
        self,
        portions: Portions | Prefetcher,
        division: Division,
        place: Callable[[Element | Staged], Any],
        position: int = 0,
    ) -> None:
        self._portions = portions
        self._division = division
        self._place = place
        self._filler = Filler()
        self._rows = division.rows
        self._position = position
        self._is_over = False
        self._given = 0
        self._held: tuple[Element | Exception, bytes] | None = None
        self.closing = False
        """Whether the pass has been called off."""
        self.is_placing = False
        """Whether ``place`` is at work."""
        self.together: tuple[int, int] | None = None
        """How many elements to give at once, as a :class:`Chunk`, and after how many elements of this pass the first
        such chunk begins; ``None``: each on its own. Set from any thread."""

    def __next__(self) -> Any:
        """The next element, placed; or the next :class:`Chunk`.

        Raises:
          StopIteration: there is none.
          ValueError: there never was one.
          Exception: whatever the dataset raised.
        """
        if self.together is not None:
            chunk = self._several(*self.together)
            self._given += chunk.group.count
            return chunk
        placed = self._placed(self._next_element())
        self._given += 1
        return placed

    def _next_element(self) -> Element:
        if self._held is not None:
            (held, _), self._held = self._held, None
            if isinstance(held, Exception):
                raise held
            return held
        while not self._is_over:
            element = self._divided()
            if element is None:
                self._is_over = True
            elif self._division.partial is PartialBatch.DROP and element.sizes != self._rows:
                continue
            else:
                if self._division.partial is PartialBatch.PAD:
                    element = self._filled(element)
                self._position += 1
                return element
        if not self._position:
            raise ValueError(f"the dataset, {self._division.source}, gave no element. {WHY_EMPTY}")
        raise StopIteration

    def _placed(self, element: Element | Staged) -> Any:
        self.is_placing = True
        try:
            if self.closing:
                raise CalledOff
            return self._place(element)
        finally:
            self.is_placing = False

    def _several(self, steps: int, start: int) -> Chunk:
        """The next elements of one kind, at most up to a multiple of ``steps`` elements after the first ``start``."""
        room = steps - (self._given - start) % steps
        states = [self.state()]
        first = self._next_element()
        states.append(self.state())
        if not first.alike:
            return Chunk(Single(self._placed(first)), states)
        staged = Staged(first, room)
        while staged.count < room:
            try:
                element = self._next_element()
            except StopIteration:
                break
            except Exception as error:  # after those that have come before it
                self._held = error, states[-1]
                break
            if not staged.takes(element):
                self._held = element, states[-1]
                break
            staged.add(element)
            states.append(self.state())
        return Chunk(self._placed(staged), states)

    def state(self) -> bytes:
        """Where the pass is, pickled: after the element that was given last."""
        if self._held is not None:
            return self._held[1]
        rows = None if self._rows is None else list(self._rows)
        return pickle.dumps({"batches": self._portions.state(), "position": self._position, "rows": rows})

    def call_off(self) -> None:
        """The element that is being made is not wanted any more. Called from any thread."""
        self.closing = True
        self._portions.call_off()

    def close(self) -> None:
        """End what reads the batches."""
        self._portions.close()

    # --- dividing ---------------------------------------------------------------------------------------

    def _divided(self) -> Element | None:
        """The next batch, divided over the replicas; ``None`` at the end."""
        portion = self._portion()
        if portion is END:
            return None
        sizes = portion.sizes
        if self._rows is None:
            self._rows = sizes
        return Element(portion.tree, portion.parts, sizes, len(set(sizes)) == 1, together=portion.together)

    def _portion(self) -> Portion:
        """What this worker has read for the next element."""
        try:
            portion: Portion = next(self._portions, END)
            return portion
        except UnfitBatchError as error:
            unfit = error
        raise unfit.named(self._where())

    def _filled(self, element: Element) -> Element:
        assert self._rows is not None
        rows = max(self._rows)
        if max(element.sizes) > rows:
            raise ValueError(
                f"{self._where()} has {max(element.sizes)} examples for a replica, after elements of {rows}: "
                "partial_batch='pad' fills up to the size of a full batch, and has room for no more"
            )
        return dataclasses.replace(element, alike=True, filled=self._filler.filled(element.parts, rows))

    def _where(self) -> str:
        return f"element {self._position}"
