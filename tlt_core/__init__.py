"""The trainer itself: everything that Prefect, MLflow and DVC are built around."""
