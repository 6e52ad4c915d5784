"""Write the tokens that SGLang's draft may use, and show what such a map covers and costs."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import TokenMapConfig


@hydra.main(config_name="build_token_map", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: TokenMapConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.token_map import build_token_map

    build_token_map(config)


if __name__ == "__main__":
    prepare("build_token_map", TokenMapConfig)
    main()
