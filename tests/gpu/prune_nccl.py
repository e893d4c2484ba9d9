"""In the unpacked wheel nvidia-nccl-cu13 2.31.2: leave of libnccl.so.2 what compute capability 9.0 needs."""

import struct
d=bytearray(open('nvidia/nccl/lib/libnccl.so.2','rb').read())
d[0x42f268:0x42f268+0x841d348]=bytes(0x841d348)
pos=0x8850870
while True:
    pos=d.find(struct.pack('<I',0xBA55ED50),pos)
    if pos<0: break
    magic,ver,hs,size=struct.unpack_from('<IHHQ',d,pos)
    if ver!=1 or hs!=16: pos+=4; continue
    p=pos+hs; end=p+size
    while p<end:
        kind,v,eh,ps,cs,opt=struct.unpack_from('<HHIQII',d,p); minor,major,arch=struct.unpack_from('<HHI',d,p+24)
        if arch!=90: d[p+eh:p+eh+ps]=bytes(ps)
        p+=eh+ps
    pos=end
open('libnccl.so.2','wb').write(d)
