"""Preference pairs: a sample is a prompt with the chosen answer, then with the rejected one."""
