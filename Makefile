.PHONY: run test

run:
	python3 -m batchtp.bootstrap run examples/prompts.jsonl

test:
	python3 -m batchtp.bootstrap test
