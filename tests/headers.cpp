// Compiles the headers that most tests include.
