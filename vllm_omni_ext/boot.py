"""Start-up hook run inside `import torch` (entry point group `torch.backends`). Never raises, imports nothing heavy."""


def autoload() -> None:
    """Entry point; filled in by the boot work."""
