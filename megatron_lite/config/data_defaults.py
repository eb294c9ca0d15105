"""What the data flags mean when they are left out."""

SPLIT = "969,30,1"  # shares of training, validation and test
TOKENIZERS = ("GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer")  # the first one when left out
TOKENIZER = TOKENIZERS[0]
