"""Talk to a target whose draft head shows what it guesses."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import ChatConfig


@hydra.main(config_name="chat", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: ChatConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    import readline  # noqa: F401  # questions can be edited and called back

    from train.chat import chat

    chat(config)


if __name__ == "__main__":
    prepare("chat", ChatConfig)
    main()
