// Compiles C++ to machine code with Clang in this process. It reads and
// writes only memory: the compiler's file system holds only the given files.
#include <clang/CodeGen/CodeGenAction.h>
#include <clang/Frontend/CompilerInstance.h>
#include <clang/Frontend/CompilerInvocation.h>
#include <clang/Frontend/TextDiagnosticPrinter.h>
#include <clang/Sema/Sema.h>
#include <clang/Sema/TemplateInstCallback.h>
#include <llvm/IR/Module.h>
#include <llvm/Passes/PassBuilder.h>
#include <llvm/Support/MemoryBuffer.h>
#include <llvm/Support/VirtualFileSystem.h>
#include <llvm/Support/raw_ostream.h>

#include <atomic>
#include <memory>

#include "runtime/llvm/plugin_parts.hpp"

namespace flashjit::llvm_plugin {
namespace {

using FileSystem = llvm::IntrusiveRefCntPtr<llvm::vfs::FileSystem>;

FileSystem file_system(const flashjit_llvm_source& source) {
  auto files = llvm::makeIntrusiveRefCnt<llvm::vfs::InMemoryFileSystem>();
  for (const flashjit_llvm_file& file : llvm::ArrayRef(source.files, source.num_files)) {
    // The lexer needs a zero after the last byte, hence a copy.
    files->addFile(file.name, 0, llvm::MemoryBuffer::getMemBufferCopy({file.data, file.size}, file.name));
  }
  return files;
}

// The versions of Clang differ here. Makes the diagnostics write to `said`, by the options parsed so far.
void create_diagnostics(clang::CompilerInstance& compiler, [[maybe_unused]] const FileSystem& files,
                        llvm::raw_ostream& said) {
#if LLVM_VERSION_MAJOR >= 22
  compiler.setVirtualFileSystem(files);
  compiler.createDiagnostics(new clang::TextDiagnosticPrinter(said, compiler.getDiagnosticOpts()));
#elif LLVM_VERSION_MAJOR >= 20
  compiler.createDiagnostics(*files, new clang::TextDiagnosticPrinter(said, &compiler.getDiagnosticOpts()));
#else
  compiler.createDiagnostics(new clang::TextDiagnosticPrinter(said, &compiler.getDiagnosticOpts()));
#endif
}

void create_file_manager(clang::CompilerInstance& compiler, [[maybe_unused]] const FileSystem& files) {
#if LLVM_VERSION_MAJOR >= 22
  compiler.createFileManager();
#else
  compiler.createFileManager(files);
#endif
}

// Ends Clang's own work once a call is to end. Clang makes no more instances of templates after a fatal error
// together with an error of its own language, and then no code; what is left to read takes some hundredths of
// a second. Nobody reads these errors.
class Ending final : public clang::TemplateInstantiationCallback {
 public:
  Ending(clang::CompilerInstance& compiler, const std::atomic<bool>& ends)
      : compiler_(compiler), ends_(ends) {}

  void initialize(const clang::Sema&) override {}
  void finalize(const clang::Sema&) override {}
  void atTemplateBegin(const clang::Sema&, const clang::Sema::CodeSynthesisContext&) override {
    if (!ends_.load(std::memory_order_relaxed)) return;
    clang::DiagnosticsEngine& diagnostics = compiler_.getDiagnostics();
    if (diagnostics.hasFatalErrorOccurred() && diagnostics.hasUncompilableErrorOccurred()) return;
    diagnostics.Report(clang::diag::err_expected_namespace_name);
    diagnostics.Report(diagnostics.getCustomDiagID(clang::DiagnosticsEngine::Fatal, "ended"));
  }
  void atTemplateEnd(const clang::Sema&, const clang::Sema::CodeSynthesisContext&) override {}

 private:
  clang::CompilerInstance& compiler_;
  const std::atomic<bool>& ends_;
};

// Clang's action, which looks at each instance of a template whether it is to end.
template <class Action>
class Watched final : public Action {
 public:
  explicit Watched(const std::atomic<bool>& ends) : ends_(ends) {}

 private:
  void ExecuteAction() override {
    clang::CompilerInstance& compiler = this->getCompilerInstance();
    compiler.createSema(this->getTranslationUnitKind(), nullptr);
    compiler.getSema().TemplateInstCallbacks.push_back(std::make_unique<Ending>(compiler, ends_));
    Action::ExecuteAction();
  }

  const std::atomic<bool>& ends_;
};

// A pass that ends a pipeline: optional passes after it are skipped. Of a call that is to end it leaves
// nothing for the code generator to do.
struct Finish : llvm::PassInfoMixin<Finish> {
  std::shared_ptr<bool> finished;
  const std::atomic<bool>* ends = nullptr;
  llvm::PreservedAnalyses run(llvm::Module& module, llvm::ModuleAnalysisManager&) {
    *finished = true;
    if (!*ends) return llvm::PreservedAnalyses::all();
    for (llvm::Function& function : module) function.deleteBody();
    return llvm::PreservedAnalyses::none();
  }
  static bool isRequired() { return true; }
};

// Replaces the pipeline of -O by `passes`. `error` gets what is wrong with their text.
void replace_passes(llvm::PassBuilder& builder, llvm::StringRef passes, const std::atomic<bool>& ends,
                    std::string& error) {
  const auto finished = std::make_shared<bool>(false);
  builder.getPassInstrumentationCallbacks()->registerShouldRunOptionalPassCallback(
      [finished, &ends](llvm::StringRef, const llvm::Any&) { return !*finished && !ends; });
  builder.registerPipelineStartEPCallback(
      [=, &builder, &ends, &error](llvm::ModulePassManager& manager, llvm::OptimizationLevel) {
        if (llvm::Error problem = builder.parsePassPipeline(manager, passes))
          error = llvm::toString(std::move(problem));
        Finish finish;
        finish.finished = finished;
        finish.ends = &ends;
        manager.addPass(std::move(finish));
      });
}

}  // namespace

bool compile(const flashjit_llvm_source& source, const std::atomic<bool>& ends,
             llvm::SmallVectorImpl<char>& code, std::string& log) {
  llvm::raw_string_ostream said(log);
  llvm::SmallVector<const char*, 64> options(source.options, source.options + source.num_options);
  options.push_back(source.files[0].name);

  clang::CompilerInstance compiler;
  const FileSystem files = file_system(source);
  create_diagnostics(compiler, files, said);
  if (!clang::CompilerInvocation::CreateFromArgs(compiler.getInvocation(), options,
                                                 compiler.getDiagnostics()))
    return false;
  std::string passes_error;
  if (source.passes != nullptr) {
    compiler.getCodeGenOpts().PassBuilderCallbacks.emplace_back(
        [&](llvm::PassBuilder& builder) { replace_passes(builder, source.passes, ends, passes_error); });
  }
  create_diagnostics(compiler, files, said);
  create_file_manager(compiler, files);
  compiler.setVerboseOutputStream(said);
  compiler.setOutputStream(std::make_unique<llvm::raw_svector_ostream>(code));

  std::unique_ptr<clang::CodeGenAction> action;
  if (compiler.getFrontendOpts().ProgramAction == clang::frontend::EmitAssembly) {
    action = std::make_unique<Watched<clang::EmitAssemblyAction>>(ends);
  } else {
    action = std::make_unique<Watched<clang::EmitObjAction>>(ends);
  }
  const bool ok = compiler.ExecuteAction(*action);
  said << passes_error;
  return ok && passes_error.empty();
}

}  // namespace flashjit::llvm_plugin
