"""The scripts that made the embedded models."""
