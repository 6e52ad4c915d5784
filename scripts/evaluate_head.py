"""Measure an exported head: acceptance and tokens/s, against plain decoding."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import EvaluateConfig


@hydra.main(config_name="evaluate_head", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: EvaluateConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.evaluate import evaluate
    from train.report import table

    report = evaluate(config)
    print(
        f"\n{table(report)}\n\nwritten to {report['out']}: report.txt, report.json, acceptance.png"
    )


if __name__ == "__main__":
    prepare("evaluate_head", EvaluateConfig)
    main()
