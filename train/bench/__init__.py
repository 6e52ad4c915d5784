"""The training step beside the papers', which lies here too."""
