"""Reading: what a dataset is made of, and its batches, which workers share and which can be left and gone on with."""
