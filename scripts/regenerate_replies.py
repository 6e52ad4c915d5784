"""Let the target write the replies of the chats."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import RegenerateConfig


@hydra.main(config_name="regenerate_replies", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: RegenerateConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.replies.regenerate import regenerate

    regenerate(config)


if __name__ == "__main__":
    prepare("regenerate_replies", RegenerateConfig)
    main()
