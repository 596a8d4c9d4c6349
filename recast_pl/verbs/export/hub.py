"""Upload to the Hugging Face Hub."""

from pathlib import Path


def check_destination(repository: str) -> None:
    """Refuses a repository that cannot be pushed to, before anything is written.

    Raises:
        ValueError: for a name that is none, or without a token.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"push_to: expected owner/name, got {repository!r}: {error}") from error
    if repository.count("/") != 1:
        raise ValueError(f"push_to: expected owner/name, got {repository!r}")
    if get_token() is None:
        raise ValueError(
            f"push_to: no token of the Hugging Face Hub to write {repository} with; run `hf auth login` or set "
            "HF_TOKEN, or leave --push_to out"
        )


def push(folder: Path, repository: str) -> str:
    """Uploads all of `folder` to the model repository, which is made where there is none; returns its address.

    Raises:
        ValueError: where the Hub refuses or cannot be reached; the folder stays.
    """
    import httpx2
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export of a recast_pl checkpoint"
        )
    except (httpx2.HTTPError, OSError) as error:
        raise ValueError(f"push_to: {repository} did not take {folder}, which stays: {error}") from error
    return str(address)
