"""The command line: `meshdsl <command> --flags`."""
