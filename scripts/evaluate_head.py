"""Measure an exported head: acceptance and tokens/s, against plain decoding."""

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import EvaluateConfig


@hydra.main(config_name="evaluate_head", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: EvaluateConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.evaluate import evaluate
    from train.report_text import table
    from train.serve.model_card import serve_command

    report = evaluate(config)
    serve = serve_command(
        Path(config.head),
        config.target.path,
        report["head"]["engine"],
        num_steps=report["settings"]["drafting"]["num_steps"],
    )
    print(f"\n{table(report)}\n")
    print(f"written to {report['out']}: report.txt, report.json, report.html, answers.jsonl")
    print(f"serve with {serve}")


if __name__ == "__main__":
    prepare("evaluate_head", EvaluateConfig)
    main()
