// The vector types of the instruction set that this translation unit is compiled for.
#pragma once

// Whether integers are multiplied and added in one instruction (AVX-VNNI).
#ifndef KVANT_VNNI
#define KVANT_VNNI 0
#endif

// Whether codes are multiplied as bytes, four at a time, by both halves of a 15-bit number (Arm).
#ifndef KVANT_BYTE_DOT
#define KVANT_BYTE_DOT 0
#endif
// Whether they are multiplied eight at a time (i8mm).
#ifndef KVANT_BYTE_MATRIX
#define KVANT_BYTE_MATRIX 0
#endif

#if KVANT_LEVEL == 512
#include "vec512.hpp"
#define KVANT_BFLOAT_DOT 1
#elif KVANT_LEVEL == 256
#include "vec256.hpp"
#define KVANT_BFLOAT_DOT 0
#elif KVANT_LEVEL == 128
#if KVANT_BYTE_DOT
#include "bytes128.hpp"
#else
#include "words128.hpp"
#endif
#define KVANT_BFLOAT_DOT 0
#else
#include "vec_plain.hpp"
#define KVANT_BFLOAT_DOT 0
#endif

// Whether codes of fewer than 8 bits are multiplied as integers, not as 16-bit floats.
#define KVANT_INTEGER_CODES !KVANT_BFLOAT_DOT

// Whether matrices of 16-bit floats are multiplied on the processor's tiles (AMX).
#ifndef KVANT_TILES
#define KVANT_TILES 0
#endif

#if KVANT_LEVEL != 256
namespace kvant::KVANT_TARGET {

// Channels of a row are loaded in their order, except on AVX2.
template <class T> inline F load_split(const T *p) { return load(p); }
template <class T> inline F split(F x) { return x; }
template <class T> inline F unsplit(F x) { return x; }
inline void in_registers(F &) {}

}  // namespace kvant::KVANT_TARGET
#endif
