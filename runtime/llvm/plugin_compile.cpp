// C++ to machine code with Clang in process. Reads and writes memory only: the compiler's file system holds
// the given files and nothing else.
#include <clang/CodeGen/CodeGenAction.h>
#include <clang/Frontend/CompilerInstance.h>
#include <clang/Frontend/CompilerInvocation.h>
#include <clang/Frontend/TextDiagnosticPrinter.h>
#include <llvm/Support/MemoryBuffer.h>
#include <llvm/Support/VirtualFileSystem.h>
#include <llvm/Support/raw_ostream.h>

#include <memory>

#include "runtime/llvm/plugin_parts.hpp"

namespace flashjit::llvm_plugin {
namespace {

llvm::IntrusiveRefCntPtr<llvm::vfs::FileSystem> file_system(const flashjit_llvm_source& source) {
  auto files = llvm::makeIntrusiveRefCnt<llvm::vfs::InMemoryFileSystem>();
  for (const flashjit_llvm_file& file : llvm::ArrayRef(source.files, source.num_files)) {
    // A copy, since the lexer wants a zero after the last byte.
    files->addFile(file.name, 0, llvm::MemoryBuffer::getMemBufferCopy({file.data, file.size}, file.name));
  }
  return files;
}

}  // namespace

bool compile(const flashjit_llvm_source& source, llvm::SmallVectorImpl<char>& code, std::string& log) {
  llvm::raw_string_ostream said(log);
  llvm::SmallVector<const char*, 64> options(source.options, source.options + source.num_options);
  options.push_back(source.files[0].name);

  auto invocation = std::make_shared<clang::CompilerInvocation>();
  {
    auto diagnostic_options = llvm::makeIntrusiveRefCnt<clang::DiagnosticOptions>();
    clang::DiagnosticsEngine diagnostics(llvm::makeIntrusiveRefCnt<clang::DiagnosticIDs>(),
                                         diagnostic_options,
                                         new clang::TextDiagnosticPrinter(said, diagnostic_options.get()));
    if (!clang::CompilerInvocation::CreateFromArgs(*invocation, options, diagnostics)) return false;
  }

  clang::CompilerInstance compiler;
  compiler.setInvocation(std::move(invocation));
  compiler.createDiagnostics(new clang::TextDiagnosticPrinter(said, &compiler.getDiagnosticOpts()));
  compiler.createFileManager(file_system(source));
  compiler.setVerboseOutputStream(said);
  compiler.setOutputStream(std::make_unique<llvm::raw_svector_ostream>(code));

  std::unique_ptr<clang::CodeGenAction> action;
  if (compiler.getFrontendOpts().ProgramAction == clang::frontend::EmitAssembly) {
    action = std::make_unique<clang::EmitAssemblyAction>();
  } else {
    action = std::make_unique<clang::EmitObjAction>();
  }
  return compiler.ExecuteAction(*action);
}

}  // namespace flashjit::llvm_plugin
