// FOREWORD_VECTORIZED: compile a function for the vector units a machine may have, chosen when the module is loaded.
#pragma once

// The loader chooses before the runtime of the thread sanitizer is ready, whose calls the choosing functions contain.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__)
#define FOREWORD_VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOREWORD_VECTORIZED
#endif
