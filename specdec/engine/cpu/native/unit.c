// All kernels of one instruction set: compiled once for each, with -DUNIT=avx2, avx512, avx512_bf16 or neon.
#include "internal.h"
#include "parallel.h"
#include "products.h"

#include "rows.h"
#include "attend.h"
#include "step.h"
#include "sampling.h"
#include "chain.h"

#define JOINED(a, b) a##b
#define TABLE_OF(unit) JOINED(sd_kernels_, unit)
#define TEXT(x) #x
#define NAME_OF(unit) TEXT(unit)

#if defined(__AVX512BF16__)
#define FAMILY "avx512_bf16"
#else
#define FAMILY "fma"
#endif

const sd_kernels TABLE_OF(UNIT) = {
    .family = FAMILY,
    .instructions = NAME_OF(UNIT),
    .packed_bytes = packed_bytes,
    .pack = pack,
    .pack_groups = pack_groups,
    .unpack = unpack,
    .product = product,
    .normalize = normalize,
    .activate = activate,
    .tanh_of = tanh_all,
    .write = write,
    .attend = attend,
    .argmax = argmax,
    .race = race,
    .guess = guess,
    .mask = mask,
    .step = step_on,
    .draft = draft_chain,
};
