"""Models of other libraries as arguments of steps, one adapter each; loaded when the user has loaded the library."""
