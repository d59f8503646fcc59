"""A ticket stands for work that finishes later, on a stream, a link or a host worker."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Ticket(Protocol):
    """Two methods, because a caller may only look or wait."""

    def done(self) -> bool:
        """Whether the work has finished; never blocks."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the work has finished; raise what the work raised."""
        ...


class Finished:
    """The ticket of work that was finished when it was asked for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


FINISHED = Finished()


class Transfer(NamedTuple):
    """A copy under way. Tensor and ticket travel together, so the memory outlives the copy.

    Attributes:
        tensor: where the data is to be read, valid after ``wait()``.
        source: what is being read; must stay unchanged until ``done()``, and alive unless
            :meth:`let_go` was called.
    """

    tensor: Tensor
    source: Tensor
    ticket: Ticket

    def done(self) -> bool:
        return self.ticket.done()

    def wait(self) -> Tensor:
        self.ticket.wait()
        return self.tensor

    def let_go(self) -> None:
        """Leave device memory to the copy: once it is done and nobody else refers to it, it is free."""
        return
