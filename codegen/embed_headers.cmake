# Writes OUTPUT, a C++ file that holds each header of NAMES as a raw string. NAMES are relative to TEMPLATES.
# cmake -DTEMPLATES=folder -DNAMES=a.h;b/c.cuh -DOUTPUT=file -P embed_headers.cmake
cmake_minimum_required(VERSION 3.25)

set(entries "")
foreach(name IN LISTS NAMES)
  file(READ ${TEMPLATES}/${name} text)
  string(FIND "${text}" ")__header\"" clash)
  if(NOT clash EQUAL -1)
    message(FATAL_ERROR "${name} holds the delimiter of the raw string that embeds it")
  endif()
  string(APPEND entries "    {\"${name}\", R\"__header(${text})__header\"sv},\n")
endforeach()

file(WRITE ${OUTPUT} "// Written by embed_headers.cmake from templates/; edit those.
#include \"codegen/embedded_headers.hpp\"

namespace flashjit {

std::span<const EmbeddedHeader> embedded_headers() {
  // sv: compilers that count the characters themselves reach a limit of constant evaluation.
  using namespace std::string_view_literals;
  static constexpr EmbeddedHeader headers[] = {
${entries}  };
  return headers;
}

}  // namespace flashjit
")
