"""What happens at the end of a --multirun of scripts.train_head."""

import os
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from train.config import CompareConfig


class ShowTable(Callback):
    """Prints the runs side by side, once."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            from train.comparing.table import compare

            print("\n" + compare(CompareConfig(runs=config.out)))
