// flashjit forward for sm_90a
// {"op": "forward", "dtype": "fp16", "head_dim": 64, "mask": ["causal"], "dropout": true}
#include "cuda/forward_sm90a.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec : ForwardSm90aSpec {
  using Element = fp16;
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  static constexpr bool dropout = true;
};

struct WgmmaProducts {
  static FLASHJIT_FN void qk(float (&d)[48], const u32 (&a)[4][4], u64 b) {
    asm volatile(
        "{.reg .b32 low; .reg .b64 a, b; .reg .pred p;\n"
        "add.u32 low, %64, 0; mov.b64 b, {low, %65};\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, %51}, b, 0, 1, 1, 0;\n"
        "add.u32 low, %64, 2; mov.b64 b, {low, %65};\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%52, %53, %54, %55}, b, 1, 1, 1, 0;\n"
        "add.u32 low, %64, 4; mov.b64 b, {low, %65};\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%56, %57, %58, %59}, b, 1, 1, 1, 0;\n"
        "add.u32 low, %64, 6; mov.b64 b, {low, %65};\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%60, %61, %62, %63}, b, 1, 1, 1, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]), "r"(a[3][3]), "r"(static_cast<u32>(b)), "r"(static_cast<u32>(b >> 32)));
  }
  static FLASHJIT_FN void pv(float (&d)[32], const u32 (&a)[6][4], u64 b, int accumulate) {
    asm volatile(
        "{.reg .b32 low; .reg .b64 a, b; .reg .pred p;\n"
        "setp.ne.b32 p, %58, 0;\n"
        "add.u32 low, %56, 0; mov.b64 b, {low, %57};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, b, p, 1, 1, 1;\n"
        "add.u32 low, %56, 128; mov.b64 b, {low, %57};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%36, %37, %38, %39}, b, 1, 1, 1, 1;\n"
        "add.u32 low, %56, 256; mov.b64 b, {low, %57};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%40, %41, %42, %43}, b, 1, 1, 1, 1;\n"
        "add.u32 low, %56, 384; mov.b64 b, {low, %57};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%44, %45, %46, %47}, b, 1, 1, 1, 1;\n"
        "add.u32 low, %56, 512; mov.b64 b, {low, %57};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%48, %49, %50, %51}, b, 1, 1, 1, 1;\n"
        "add.u32 low, %56, 640; mov.b64 b, {low, %57};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%52, %53, %54, %55}, b, 1, 1, 1, 1;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]), "r"(a[3][3]), "r"(a[4][0]), "r"(a[4][1]), "r"(a[4][2]), "r"(a[4][3]), "r"(a[5][0]), "r"(a[5][1]), "r"(a[5][2]), "r"(a[5][3]), "r"(static_cast<u32>(b)), "r"(static_cast<u32>(b >> 32)), "r"(accumulate));
  }
};

struct Config {
  static constexpr int block_m = 192;
  static constexpr int block_n = 96;
  static constexpr int num_stages = 2;
  static constexpr int num_warps = 16;
  static constexpr bool q_in_registers = true;
  static constexpr bool ping_pong = true;
  static constexpr TileOrder tile_order = TileOrder::sections;
  static constexpr bool pack_gqa = false;
  using Products = WgmmaProducts;
  static constexpr int given_registers = 8;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::num_warps * 32, 1)
    flashjit_forward(const __grid_constant__ Sm90aForwardParams params, const __grid_constant__ ForwardMaps maps) {
  forward_sm90a<Spec, Config>(params, maps);
}
extern "C" __global__ void __launch_bounds__(forward_merge_threads)
    flashjit_forward_merge(const __grid_constant__ Sm90aForwardParams params) {
  forward_sm90a_merge<Spec, Config>(params);
}
