"""Run the target over chats and keep its features."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import DumpConfig


@hydra.main(config_name="dump_features", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: DumpConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.dump.run import dump

    dump(config)


if __name__ == "__main__":
    prepare("dump_features", DumpConfig)
    main()
