"""Tasks and rewards that a config names, such as `reward=maxbatch.rl.verifiers:right_number`."""
