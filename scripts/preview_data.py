"""Show what a dump would store: some sequences with their mask, and figures of all."""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import PreviewConfig


@hydra.main(config_name="preview_data", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: PreviewConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.chats.preview import preview, wants_color

    print(preview(config, color=wants_color(config.color, sys.stdout)))


if __name__ == "__main__":
    prepare("preview_data", PreviewConfig)
    main()
