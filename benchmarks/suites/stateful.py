"""What stands for ``torchdata.stateful_dataloader`` in torchdata's tests."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import offload

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Stateful(Protocol):
    """What has a state. torchdata's tests derive data sets from it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class StatefulDataLoader(offload.DataLoader[T_co]):
    """offload's loader, with the one argument that only torchdata's has.

    Args:
        snapshot_every_n_steps: how often torchdata's workers tell their state. offload's state needs no snapshots.
    """

    def __init__(self, *args: Any, snapshot_every_n_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
