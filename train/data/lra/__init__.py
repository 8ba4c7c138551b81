"""The Long Range Arena's data: `tasks.load` gives each split's examples, the batches group them by length."""
