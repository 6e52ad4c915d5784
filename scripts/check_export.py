"""Look at a head's folder, or compare it in a real serving engine with our own decoding."""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import CheckConfig


@hydra.main(config_name="check_export", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: CheckConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    if config.path:
        from train.serve.inspect_head import inspect_head

        report = inspect_head(config)
    else:
        from train.serve.check import check
        from train.serve.check_sglang import check_sglang, is_for_sglang

        report = check_sglang(config) if is_for_sglang(config) else check(config)
    if not report["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    prepare("check_export", CheckConfig)
    main()
