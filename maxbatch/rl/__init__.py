"""Reinforcement learning: GRPO post-training on prompts whose responses are scored by functions.

`templates` and `prompts` (the stream of prompts), `arithmetic` (the task that needs no download), `rewards`,
`reward_process` and `reward_worker` (the functions that score responses, in processes of their own).
"""
