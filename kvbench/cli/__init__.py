"""The command line: composes configs by Hydra, checks them and runs their jobs."""
