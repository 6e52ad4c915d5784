"""Put training runs side by side: a table, a picture and JSON."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import CompareConfig


@hydra.main(config_name="compare_runs", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: CompareConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.comparing.table import compare

    print(compare(config))


if __name__ == "__main__":
    prepare("compare_runs", CompareConfig)
    main()
