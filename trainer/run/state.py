"""What a run is at, besides its tensors and random states: the JSON of a checkpoint."""

from dataclasses import dataclass
from typing import Any

from data.loading.batch import Cursor
from trainer.backbone.compatibility import check_tokenizer
from trainer.checkpoints import Checkpoint


@dataclass(frozen=True)
class TrainState:
    """`step` updates are done and `cursor` is where the data goes on; `evaluated` is the last step
    evaluated, `skipped` counts updates left out, `loss_scale` is that of fp16. `tree`, `data` and
    `tokenizer` tell from others what a run cannot go on without."""

    step: int
    cursor: Cursor
    tree: str
    data: str
    tokenizer: str | None
    evaluated: int = 0
    skipped: int = 0
    loss_scale: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "cursor": self.cursor.to_json()}

    def resumed(self, checkpoint: Checkpoint) -> "TrainState":
        """The state in a checkpoint; ValueError where its tree, shards or tokenizer are others."""
        saved = checkpoint.state
        if saved["data"] != self.data:
            raise ValueError(
                f"checkpoint {checkpoint.folder} was trained on other shards: point data.shards at "
                "those, or start another run folder"
            )
        check_tokenizer(checkpoint, self.tokenizer)
        if saved["tree"] != self.tree:
            raise ValueError(
                f"checkpoint {checkpoint.folder} has another label tree: its shards had other "
                "classes or label vectors; point data.shards at those, or start another run folder"
            )
        own = {name: saved[name] for name in vars(self) if name in saved}
        return TrainState(**{**own, "cursor": Cursor.from_json(saved["cursor"])})
