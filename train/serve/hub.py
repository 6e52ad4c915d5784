"""Upload of an exported folder to the hub."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)

LEFT_HERE = ["check/*", "evaluation/answers.jsonl", "*.log"]  # of use on this machine only


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload an export to the hub repository ORG/NAME, which is made if it is not there.

    Returns its address. Raises RuntimeError that says what to do without a token, without the
    right to write there, and without a connection.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.errors import HTTPError as HttpError  # of the client that it uses
    from huggingface_hub.utils import get_token

    if get_token() is None:
        raise RuntimeError(
            f"push_to_hub={name} needs a token with write access: run `hf auth login`, or set "
            f"HF_TOKEN. The export itself is whole, in {folder}."
        )
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=LEFT_HERE,
            commit_message="Export of an EAGLE draft head",
        )
    except (HttpError, HFValidationError, OfflineModeIsEnabled) as error:
        raise RuntimeError(
            f"push_to_hub={name} failed: {error}\nCheck the name (ORG/NAME), the token's right to "
            f"write there, and the connection. The export itself is whole, in {folder}."
        ) from error
    log.info("pushed      %s%s", address, " (private)" if private else "")
    return str(address)
