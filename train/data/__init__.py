"""The data of all tasks: `dataset.load` gives a text's tokenizer and corpora, the streams cut them in batches."""
