"""The formats of GGUF files whose weights are integers of a table: d q, with q from the table.

IQ4_NL and IQ4_XS have a table of 16 numbers. In IQ1, IQ2 and IQ3 an index selects 4 or 8 numbers at once from a
codebook, and signs follow; those of IQ1 are 8 g + 1 or 8 g − 1 for an entry g of the codebook. NVFP4 and MXFP4 have
E2M1. A function here decodes blocks, uint8 [n, block_bytes], to q, int8 [n, groups, weights of a group], and d, float32
[n, groups]; its docstring shows the layout.

A codebook is stored as the entries in ascending order: an entry is a number whose digits, lowest first, are the places
of its weights in ``values``. The codebooks are those of ggml, in whose format the files are (THIRD_PARTY_NOTICES.md).
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, U8, U16, Bools, Ints
from foreword.models.blocks import f16, halves

I8 = npt.NDArray[np.int8]
Integers = tuple[I8, F32]

E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""The numbers of MXFP4 and NVFP4 by their 4 bits, times 2."""
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)

_CODEBOOKS = {
    "IQ2_XXS": (
        (8, 25, 43),
        8,
        "c-kdTL2AQ53@l<18zD>(%d(hdF=h$I1Y=ANrudLU2*rmIaws|GB|Y{5eM{fc?<Cq*hmn{WG13eC6@n><MkizoXsW~vl50RJDl2m7l>-VONs5"
        "<?--j^MS$$Sm_mIWXNRx`}`lhW;fD&tS8uoyGYhkh@T$HQ2=<b2X&%=K(TB9K%(VAd`rG%Wfo|dbUX6g;ijfNs*4E1onKv;J@VY4jnC?R!o%"
        "H{)xuU|kHBlGdCd?C4My_4Pbw(9+Z?_MWIx1arY>(hFFY{n;%BpCw",
    ),
    "IQ2_XS": (
        (8, 25, 43),
        8,
        "c-mc%!D_=W42Fj=LI`7w5GD*0f+-=45K1XIj2?Q}X^fr6PCM<mXW1i9PS-4}!M3oZU!VUw*eti+xSS67FL`-Fv@MsA0bL-yX#&UF3Z@Jg9OU"
        "L##-WLLAqyp=3XYC%BydTt65=6PEV8>kIq+z*GW)c*p6E5X>FME0T6?4(7&|SEwM3XRcRrqMIwuW}zVW?-|Lj+~&14tJQUT`G52J~I9!I8xQ"
        "!ODXtTyR&V^FTvz_C448WI-5Jq}$WAE{)9uciu-SNIHV3@_rwx8vblsB8^L3!5<Z_VtJhWss=tq<zMi7!rLHB(5VvY&1Wsx_iWP599mLpSoR"
        "TrfI@r^qOTie5;y&d&C(g=;IGd78#)",
    ),
    "IQ2_S": (
        (8, 25, 43),
        8,
        "c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s(v1b{Ofw;)l5ecGzfFpcr"
        "Gw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85(q+qs7Rf}2t!WkbcRdE_su-?a^f*^J_%|3YF+P4b"
        "09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$O{&AX3f0W*$UJaV_nXH;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&TobK53l?U|K?"
        "4mZ#z^>~y*k+!9GT;z*5_&T)VvnXa8$;{ruIEM+exG)j1forhPTGY=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ710T&F)7KfH",
    ),
    "IQ3_XXS": (
        (4, 12, 20, 28, 36, 44, 52, 62),
        4,
        "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv*cdV0O)CtUZJ2G"
        "E2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU"
        "1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE",
    ),
    "IQ3_S": (
        (1, 3, 5, 7, 9, 11, 13, 15),
        4,
        "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5QRnqP#h<ZksOlW"
        "I2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_"
        "#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8"
        "*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W",
    ),
    "IQ1_S": (
        (-1, 0, 1),
        8,
        "c-n1M*Mi$H3@e8yd1Umx|Nor@NGW!%)#YqagA<^CDTg(6ZJ|1H!iNh)l@?Bc)Bd&JA{v(QGvn*PW<<El3ojKJSWt+9xz^Z>Pl!)HmFi7gaoC"
        "SbtKUtiH;EyJ$%*4}w{CD6BgI|vq^7fCINL0yQ7i?#;D9g&48Ivj%cvY)({reVqvp-hTRgCfRV(+g!-Y>In6=a>b5UwCqs{o!p4T?CiYYhYw"
        "+=sjL^)UcNW%W4Xgy7*9`|9TW9wb}42KzW+ba`HK&9dm5pNfd@{)0)QlAq0T|$XsRH&HXqS?vfRTi<jGyWX71VgwhEW+4tHQKWR%%s6ICy^I"
        "$L)KOrZucsmUW(st07<4I6Q<K~KyQ{0YUIcwL6iH|_Bd^eRfTzo$HHV~)aRRd%+zD&lUZs;&aSJLl_Z?$OxgkzdYjOX3<%o!m&dZMg@!~YtH"
        "og6tUb1$dlZI}B3^bw3BJVq#LM(bKVm7(o3Y|>>L-`x#@3QJn?%L7NG0_@pXmsf5&Lph?vP#9<TG@cw<Xv*sT02Iw3*yT5hQ2kyhL_n<h_-5"
        "rKcpn>J;&B=!TIiF|4~d6ITYaR=u1$6TIP*lJ-bKA#HFJgn)%eI+Mh}+93|4+XKjZk?86dlT#nM%<@ycdXqjEf;4S*%q=e?z6O9#>QsWj-Nk"
        "oPdm*%>0w{xy7L$)AGI8!k9c)%Ej|mj9-mRKg5lntGy~3iGN#ruv1Fr*UqnGeN%j_hvquWNpsNzlrT%AnEvzjnmV_mF8Psmk=B)TIzeEC4LB"
        "UWqGegEO$<3@6nFp|(imhX#kd^agTkL1jZEynZ;)zza?I(*F9;D-&~iiw~CjOhPxq`ody4+At?f{92D#NsRnfwZ%!dcs&X`aCXlEQhOoSTP("
        "uaN9<GUQUAe@l~bkgO>D^mljRYD-D&w$JBo|#ovfNY<(=^&&<MX1hLq!Z-!w*lOzUgyCm`^XpS%I11&uUn}{CmaUJ=1`xnWK8KD",
    ),
}
"""values, weights of an entry, and the compressed steps from entry to entry: each a byte, or 255 for each 255 of it and
then the rest.
"""


@cache
def codebook(name: str) -> I8:
    """Return the entries of a codebook, int8 [entries, weights of an entry]."""
    values, width, text = _CODEBOOKS[name]
    steps = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
    entries = np.cumsum(steps, dtype=np.int64)[steps < 255]
    found: I8 = np.array(values, np.int8)[entries[:, None] // len(values) ** np.arange(width) % len(values)]
    return found


@cache
def _signs() -> I8:
    """Return the signs of 8 weights by a byte, int8 [256, 8]: bit i is set where weight i is negative."""
    negative = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)
    return np.int8(1) - np.int8(2) * negative


def _signs_of_7(index: Ints) -> I8:
    """Return the signs of 8 weights by 7 bits, int8 [..., 8]: an even number of the 8 is negative."""
    parity = index ^ index >> 4
    parity = parity ^ parity >> 2
    found: I8 = _signs()[index | (parity ^ parity >> 1) % 2 * 128]
    return found


def _words(b: U8, start: int, stop: int, dtype: str) -> Ints:
    """Return bytes [start, stop) of every block as integers, [n, integers]."""
    return np.ascontiguousarray(b[:, start:stop]).view(dtype)


def _fields(words: Ints, width: int, count: int) -> Ints:
    """Return the lowest ``count`` fields of ``width`` bits of every integer, lowest first, [n, integers · count]."""
    shifts = np.arange(0, width * count, width, dtype=words.dtype)
    return (words[..., None] >> shifts & words.dtype.type((1 << width) - 1)).reshape(len(words), -1)


def _index(low: U8, high: Ints) -> U16:
    """Return places in a codebook of their low 8 bits and the bits above."""
    return low | high.astype(np.uint16) << np.uint16(8)


def _entries(name: str, index: Ints, signs: I8, groups: int) -> I8:
    """Return entries of a codebook with the signs of 8 weights each, int8 [n, groups, weights]."""
    entries = codebook(name)[index].reshape(signs.shape)
    return np.multiply(entries, signs).reshape(len(index), groups, -1)


def iq2_xxs(b: U8) -> Integers:
    """Decode | d | 8 × | 4 indexes of a byte | 32 bits: 4 × 7 bits of signs, the scale |; d (scale + 1/2) / 4."""
    parts = b[:, 2:].reshape(-1, 8, 8)
    words = _words(b, 2, 66, "<u4")[:, 1::2]
    q = _entries("IQ2_XXS", parts[:, :, :4].reshape(-1, 32), _signs_of_7(_fields(words, 7, 4)), 8)
    return q, f16(b, 0) * ((words >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)


def _quarters(b: U8, scales: U8) -> F32:
    """Return d (scale + 1/2) / 4 of every 16 weights."""
    return f16(b, 0) * (_fields(scales, 4, 2).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)


def iq2_xs(b: U8) -> Integers:
    """Decode | d | 32 × 16 bits: index in 9, signs in 7 | 8 bytes of two scales |."""
    words = _words(b, 2, 66, "<u2")
    return _entries("IQ2_XS", words & 511, _signs_of_7(words >> 9), 16), _quarters(b, b[:, 66:])


def iq2_s(b: U8) -> Integers:
    """Decode | d | 32 bytes of indexes | 32 of signs | 8: bits 8 and 9 of four indexes | 8 of two scales |."""
    index = _index(b[:, 2:34], _fields(b[:, 66:74], 2, 4))
    return _entries("IQ2_S", index, _signs()[b[:, 34:66]], 16), _quarters(b, b[:, 74:])


def iq3_xxs(b: U8) -> Integers:
    """Decode | d | 64 bytes of indexes | 8 × 32 bits: 4 × 7 bits of signs, the scale |; d (scale + 1/2) / 2."""
    words = _words(b, 66, 98, "<u4")
    q = _entries("IQ3_XXS", b[:, 2:66], _signs_of_7(_fields(words, 7, 4)), 8)
    return q, f16(b, 0) * ((words >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)


def iq3_s(b: U8) -> Integers:
    """Decode | d | 64 bytes of indexes | 8: bit 8 of eight | 32 of signs | 4 of two scales |; d (2 scale + 1)."""
    index = _index(b[:, 2:66], _fields(b[:, 66:74], 1, 8))
    scale = _fields(b[:, 106:], 4, 2).astype(np.float32)
    return _entries("IQ3_S", index, _signs()[b[:, 74:106]], 8), f16(b, 0) * (2 * scale + 1)


def _of_eighths(index: U16, negative: Bools, groups: int) -> I8:
    """Return 8 g + 1, or 8 g − 1 where negative [n, indexes], of the entries g of the codebook of IQ1."""
    q = codebook("IQ1_S")[index] * np.int8(8)
    q += np.where(negative, np.int8(-1), np.int8(1))[..., None]
    return q.reshape(len(index), groups, -1)


def iq1_s(b: U8) -> Integers:
    """Decode | d | 32 bytes of indexes | 8 × 16 bits: bits 8 to 10 of 4 indexes, the scale in 3, the sign of the 1 |;
    d (2 scale + 1) / 8.
    """
    words = _words(b, 34, 50, "<u2")
    index = _index(b[:, 2:34], _fields(words, 3, 4))
    scale = f16(b, 0) * (2 * (words >> 12 & 7).astype(np.float32) + 1)
    return _of_eighths(index, np.repeat(words >> 15 == 1, 4, axis=1), 8), scale * np.float32(0.125)


def iq1_m(b: U8) -> Integers:
    """Decode | 32 bytes of indexes | 16 of two: bits 8 to 10 of an index, the sign of the 1 | 4 × 16 bits: 4 scales in
    3 bits, the next 4 bits of d, lowest first |; d (2 scale + 1) / 8.
    """
    high, words = _fields(b[:, 32:48], 4, 2), _words(b, 48, 56, "<u2")
    d = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    scale = f16(d[:, None].view(np.uint8), 0) * (2 * _fields(words, 3, 4).astype(np.float32) + 1)
    return _of_eighths(_index(b[:, :32], high & 7), high > 7, 16), scale * np.float32(0.125)


def iq4_nl(b: U8) -> Integers:
    """Decode | d | 16 bytes: low nibbles are weights 0…15, high nibbles 16…31 |."""
    return _IQ4[halves(b[:, None, 2:]).reshape(-1, 1, 32)], f16(b, 0)


def iq4_xs(b: U8) -> Integers:
    """Decode | d | 16 bits: bits 4 and 5 of 8 scales | 4 bytes: their low bits | 8 × as in IQ4_NL |; d (scale − 32)."""
    scale = _fields(b[:, 4:8], 4, 2) | _fields(_words(b, 2, 4, "<u2"), 2, 8).astype(np.uint8) << np.uint8(4)
    return _IQ4[halves(b[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)], f16(b, 0) * (scale.astype(np.float32) - 32)


def mxfp4(b: U8) -> Integers:
    """Decode | e | 16 bytes: low nibbles are weights 0…15, high nibbles 16…31 |; 2^(e − 128)."""
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return E2M1[halves(b[:, None, 1:]).reshape(-1, 1, 32)], scale


def e4m3() -> F32:
    """Return the numbers of E4M3 by their 7 bits, 4 of exponent + 7 and 3 of mantissa, without a sign: float32 [128].
    The last one, 480, stands for NaN in files.
    """
    exponent, fraction = np.divmod(np.arange(128), 8)
    numbers: F32 = np.ldexp(np.where(exponent, 8 + fraction, fraction), np.maximum(exponent, 1) - 10).astype(np.float32)
    return numbers


@cache
def _scales_of_nvfp4() -> F32:
    """Return half of each number of E4M3 by its byte, as ggml reads it: without its sign, and 0 for 127."""
    scales = np.tile(e4m3() * np.float32(0.5), 2)
    scales[127] = 0
    return scales


def nvfp4(b: U8) -> Integers:
    """Decode | 4 bytes: scales in E4M3 | 4 × 8 bytes: low nibbles are weights 0…7, high nibbles 8…15 |."""
    return E2M1[halves(b[:, 4:].reshape(-1, 4, 8)).reshape(-1, 4, 16)], _scales_of_nvfp4()[b[:, :4]]


def q1_0(b: U8) -> Integers:
    """Decode | d | 128 bits: d where one is set, else −d |."""
    return _signs()[b[:, 2:] ^ np.uint8(255)].reshape(-1, 1, 128), f16(b, 0)
