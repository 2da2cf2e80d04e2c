"""Configs that come with gammalm: each file has `get_config(arg)`; in an installed package this folder is `gammalm.configs`."""
