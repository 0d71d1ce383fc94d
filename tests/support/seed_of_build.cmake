# Writes HEADER with the number that SCRIPT prints.
execute_process(COMMAND ${SCRIPT} OUTPUT_VARIABLE seed OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
file(CONFIGURE OUTPUT ${HEADER} CONTENT "inline constexpr unsigned long long seed_of_build = @seed@;\n" @ONLY)
