"""Workers: scheduled functions, and the copies of variables that they run on."""
