"""Measure the dump against the bare forward, a plain dump, two processes, and pickles."""

import json

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from data.config import DumpConfig


@hydra.main(config_name="bench_dump", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: DumpConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from data.dump.bench import bench, table

    result = bench(config)
    print(f"\n{table(result)}\n\n{json.dumps(result)}")


if __name__ == "__main__":
    prepare("bench_dump", DumpConfig)
    main()
