"""Write a trained head as the folder that vLLM or SGLang serves."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import ExportConfig


@hydra.main(config_name="export_head", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: ExportConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.serve.export import export

    export(config)


if __name__ == "__main__":
    prepare("export_head", ExportConfig)
    main()
