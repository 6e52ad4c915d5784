"""Write the prompts of held-out conversations, to measure a head on."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import HeldoutPromptsConfig


@hydra.main(config_name="heldout_prompts", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: HeldoutPromptsConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.chats.prompts import heldout_prompts

    heldout_prompts(config)


if __name__ == "__main__":
    prepare("heldout_prompts", HeldoutPromptsConfig)
    main()
